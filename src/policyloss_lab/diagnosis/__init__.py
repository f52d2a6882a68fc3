"""`doctor`: finds the cause of a mismatch in a batch, or the symptoms in the logs of a run, and
compares whole distributions before a run.
"""
