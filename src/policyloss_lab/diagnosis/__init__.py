"""`doctor`: finds the cause of a mismatch in a batch, or the symptoms in the logs of a run."""

from policyloss_lab.diagnosis.run_doctor import RunDiagnosis, doctor_run
from policyloss_lab.diagnosis.tokens import doctor, doctor_batch
from policyloss_lab.diagnosis.verdict import Diagnosis

__all__ = ["Diagnosis", "RunDiagnosis", "doctor", "doctor_batch", "doctor_run"]
