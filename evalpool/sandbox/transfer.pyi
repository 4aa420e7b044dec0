from evalpool.api.sandbox.transfer import *
