from evalpool.api.sandbox.volumes import *
