"""The agents under TorchElastic's module path; see `holdfast.elastic.agent.server`."""
