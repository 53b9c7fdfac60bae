"""Real jobs on machines that fail at random, and the rules that must hold nevertheless.

    make chaos SEED=1 MINUTES=10

Each job runs on its own machines: network namespaces behind a switch, with host names. A seed
decides the backend, the number of nodes and workers, and the faults: workers, keepers, agents and
machines are killed, frozen, cut off, muted in one direction and restarted. Every worker records
its actions in a ledger, with one clock. When the faults are over, the job must continue and finish;
then `rules` checks the ledger, the agents' output and exit codes, and that nothing is left behind.

A seed gives the same plan, not the same run: real processes race.
"""
