"""What `partition_check` is made of: cutting a batch, running the user's step, and naming what moved the gradient."""
