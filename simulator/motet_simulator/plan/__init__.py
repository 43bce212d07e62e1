"""How many runners a workload needs: simulated runners under the real scheduler and the real supervisor."""
