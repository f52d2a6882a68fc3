"""`doctor`: what the numbers of a batch or a run say is wrong."""

from policyloss.doctor.diagnosis import Diagnosis
from policyloss.doctor.tokens import doctor

__all__ = ["Diagnosis", "doctor"]
