"""`holdfast top`: a running job in a terminal. It needs textual, which nothing else imports."""
