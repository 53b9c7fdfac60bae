"""Real jobs on machines that fail at random, and the rules that must hold all the same.

    make chaos SEED=1 MINUTES=10

Each job runs on machines of its own: network namespaces behind a switch, with host names. A seed
decides the backend, the number of nodes and workers, and which faults happen when: workers, keepers,
agents and whole machines are killed, frozen, cut off, muted in one direction and started again. Every
worker writes to a ledger what it does and when, all by the one clock of this computer. When the
faults are over the job must get going and finish; then `rules` reads the ledger, what the agents
printed, how they ended and what is left of them.

A seed gives the same plan each time, not the same run: real processes race.
"""
