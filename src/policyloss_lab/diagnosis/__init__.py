"""`doctor`: finds the cause of a mismatch in a batch, or the symptoms in the logs of a run, and
compares whole distributions before a run.
"""

from policyloss_lab.diagnosis.distributions import DistributionGap, compare_distributions
from policyloss_lab.diagnosis.run_doctor import RunDiagnosis, doctor_run
from policyloss_lab.diagnosis.tokens import doctor, doctor_batch
from policyloss_lab.diagnosis.verdict import Diagnosis

__all__ = [
    "Diagnosis",
    "DistributionGap",
    "RunDiagnosis",
    "compare_distributions",
    "doctor",
    "doctor_batch",
    "doctor_run",
]
