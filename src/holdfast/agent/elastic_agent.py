"""What any agent is: `ElasticAgent`, the interface that launchers use."""

from __future__ import annotations

from abc import ABC, abstractmethod

from holdfast.agent.workers import DEFAULT_ROLE, RunResult, WorkerGroup


class ElasticAgent(ABC):
    """Runs the workers of one node to their end."""

    @abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers until they are done; raise if that cannot be."""

    @abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """Return the workers. The agent goes on changing what is returned."""
