"""Watching and steering running jobs: the agent's side and the client's.

In an agent, `control_point` listens and `node_server` answers, in a thread that the first client starts;
`port_server` admits clients from other hosts and `log_streams` reads the workers' files. For clients,
`discovery` finds a job, and `job_client` connects to its agents; `job_logs` combines their logs.
`history` folds events into generations and node states; `live_job` and `job_feed` follow a running job.
"""
