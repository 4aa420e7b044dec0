from evalpool.api.sandbox.output import *
