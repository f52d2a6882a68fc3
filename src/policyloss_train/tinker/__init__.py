"""`--engine tinker:URL`: a server that speaks the Tinker API holds the policy, learns and samples;
prompts, rewards, advantages, the loss and the records of the run stay here.
"""
