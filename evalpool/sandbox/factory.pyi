from evalpool.api.sandbox.factory import *
