"""`report`: pages, tables and figures of everything that is kept below results/."""
