"""What happened in a job, from its log directories: records read, a model of them, a page of the model."""
