"""What can be executed in a sandbox, and how its outcome is judged."""
