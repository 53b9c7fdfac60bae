"""The report of a job: records from log directories, a model of them, and a page of the model."""
