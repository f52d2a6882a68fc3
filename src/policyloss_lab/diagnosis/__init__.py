"""`doctor`: what the numbers of a batch or a run say is wrong."""

from policyloss_lab.diagnosis.logs.run_doctor import RunDiagnosis, doctor_run
from policyloss_lab.diagnosis.tokens import doctor, doctor_batch
from policyloss_lab.diagnosis.verdict import Diagnosis

__all__ = ["Diagnosis", "RunDiagnosis", "doctor", "doctor_batch", "doctor_run"]
