"""Where programs run. Nothing outside this package knows of Docker."""
