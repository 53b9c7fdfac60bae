"""Events of a job: values, handlers and destinations, and the recorder that derives them from lifecycle events."""
