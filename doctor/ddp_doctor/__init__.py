"""What is silently wrong with a program that trains on several processes."""
