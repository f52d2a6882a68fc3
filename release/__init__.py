"""What is released, and the checks that it has to pass."""
