from evalpool.api.sandbox.box import *
