import os
import sys
from uuid import UUID

from langsmith import Client
from said import say

client = Client(api_url=os.environ["BASE_URL"], api_key="unused")
made = client.create_feedback(run_id=UUID(sys.argv[1]), key="rating", score=1, comment="fine")
say("feedback", id=str(made.id))
traced = client.create_feedback(run_id=UUID(sys.argv[1]), trace_id=UUID(sys.argv[1]), key="rating", score=0)
client.flush()
say("with trace", id=str(traced.id))
say("listed", found=sorted(str(one.id) for one in client.list_feedback(run_ids=[UUID(sys.argv[1])])))
