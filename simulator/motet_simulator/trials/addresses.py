"""Where the services of a trial are."""

from motet.settings import Addresses

SCHEDULER, SUPERVISOR, PREDICTOR = "scheduler:1", "supervisor:1", "predictor:1"
ADDRESSES = Addresses(scheduler_address=SCHEDULER, supervisor_address=SUPERVISOR, predictor_address=PREDICTOR)
