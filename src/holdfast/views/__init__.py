"""What people see of a job: tables, the terminal view, the dashboard and reports."""
