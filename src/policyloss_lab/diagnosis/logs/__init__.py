"""What the scalar logs of a run say is wrong, whoever wrote them."""
