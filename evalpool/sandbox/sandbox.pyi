from evalpool.api.sandbox.sandbox import *
