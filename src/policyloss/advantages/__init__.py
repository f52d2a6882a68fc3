"""What `policyloss.advantage` is made of: returns over time, baselines over a group, and the named estimators."""
