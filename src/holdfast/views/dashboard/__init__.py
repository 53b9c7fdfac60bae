"""The dashboard: a web page of one running job. Nothing here is imported by an agent."""
