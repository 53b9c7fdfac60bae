"""Watching and steering running jobs, both ends.

In an agent, `control_point` listens and `node_server` answers, in a thread that the first client starts;
`node_report` makes its messages, `port_server` admits clients from other hosts and `log_streams` reads
the workers' files. For clients, `discovery` finds a job, `connection` connects to its agents, and
`job_client` is the interface; `merged_events` and `job_logs` combine the output of several agents.
`history` folds events into generations and node states; `live_job` and `job_feed` follow a running job.
"""
