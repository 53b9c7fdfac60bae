"""Watching and steering running jobs, both ends.

In an agent, `control_point` listens and `node_server` answers, in a thread that the first connection
starts; `port_server` admits connections from other hosts and `log_streams` reads the workers' files.
For clients, `discovery` finds a job and `job_client` talks to it, over one `connection` per agent
(`agents`).
"""
