"""Events of a job: their values, handlers and destinations, and the recorder that makes them of lifecycle events."""
