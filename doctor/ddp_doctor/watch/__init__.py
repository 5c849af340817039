"""What is watched, by topic: importing this module, in a process that has torch, starts it."""
