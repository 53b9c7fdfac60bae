"""A running job as views show it: `model` is what is known of it, `feed` keeps that true."""
