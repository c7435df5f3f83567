"""`semmoe advise`: what each configuration takes (desk.py), does it pay (judge.py), what else would, and the page (app.py)."""
