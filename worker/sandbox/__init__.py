"""The sandboxes in which programs run. Only this package and worker.machine know of Docker."""
