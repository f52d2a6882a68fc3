"""`doctor`: what the numbers of a batch or a run say is wrong."""

from policyloss.doctor.diagnosis import Diagnosis
from policyloss.doctor.logs.run_doctor import RunDiagnosis, doctor_run
from policyloss.doctor.tokens import doctor

__all__ = ["Diagnosis", "RunDiagnosis", "doctor", "doctor_run"]
