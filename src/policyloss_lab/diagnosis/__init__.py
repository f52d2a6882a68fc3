"""`doctor`: what the numbers of a batch or a run say is wrong."""

from policyloss_lab.diagnosis.batches import doctor_batch
from policyloss_lab.diagnosis.diagnosis import Diagnosis
from policyloss_lab.diagnosis.logs.run_doctor import RunDiagnosis, doctor_run
from policyloss_lab.diagnosis.tokens import doctor

__all__ = ["Diagnosis", "RunDiagnosis", "doctor", "doctor_batch", "doctor_run"]
