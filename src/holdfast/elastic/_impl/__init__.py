"""The code that exists only for TorchElastic's names; nothing outside `elastic` imports it."""
