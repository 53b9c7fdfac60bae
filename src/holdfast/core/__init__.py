"""Pure decisions: machines that turn an event and the time into effects, without any I/O."""
