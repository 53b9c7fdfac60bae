"""The dashboard: a web page of one running job. Agents do not import it."""
