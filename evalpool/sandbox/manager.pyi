from evalpool.api.sandbox.manager import *
