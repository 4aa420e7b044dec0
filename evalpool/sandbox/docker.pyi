from evalpool.api.sandbox.docker import *
