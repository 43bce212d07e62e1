"""How torch's threads wait for each other: environment variables that OpenMP reads when torch is imported.

Threads that spin slow down all other processes. Threads that sleep at once need longer to wake than a small product
takes. So torch's threads spin for a moment, and then sleep.
"""

THREAD_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}
