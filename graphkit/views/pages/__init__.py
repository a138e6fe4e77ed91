"""Pages of records with graphs: what each one shows, and the pages that its keys lead to."""
