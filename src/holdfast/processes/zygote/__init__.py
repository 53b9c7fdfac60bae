"""The zygote: a Python that imports modules once and is forked for each worker."""
