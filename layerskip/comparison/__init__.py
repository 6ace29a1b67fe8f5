"""Quality per exit, audits, measurements and plots."""
