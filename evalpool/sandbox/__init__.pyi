"""`evalpool.sandbox` is a short name of `evalpool.api.sandbox`: the same modules and the same objects."""

from evalpool.api.sandbox import *
