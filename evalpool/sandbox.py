"""`evalpool.sandbox` is a short name of `evalpool.api.sandbox`: the same modules and the same objects."""

from evalpool.api.sandbox import *  # noqa: F403 - for type checkers and editors, which do not see through the door
from evalpool.doors import open_door

open_door(__name__)
