from evalpool.api.sandbox.local import *
