#!/bin/sh
# deploy/gcp.sh [REGION [ADDRESS]]: once for each project, before `ray up deploy/gcp.yaml`.
# A network of its own: the nodes reach each other on all ports, ADDRESS (this machine's, if not given)
# reaches them by SSH, and nobody else reaches anything. The network `default` has SSH open to everyone.
set -eu
REGION=${1:-us-central1}
ADDRESS=${2:-$(curl -fsS https://checkip.amazonaws.com)}
NAME=manta
RANGE=10.64.0.0/20

if ! gcloud compute networks describe $NAME >/dev/null 2>&1; then
  gcloud compute networks create $NAME --subnet-mode=custom
  gcloud compute networks subnets create $NAME --network=$NAME --region="$REGION" --range=$RANGE
  gcloud compute firewall-rules create $NAME-nodes --network=$NAME --allow=all --source-ranges=$RANGE
  gcloud compute firewall-rules create $NAME-ssh --network=$NAME --allow=tcp:22 --source-ranges="$ADDRESS/32"
fi
echo "network $NAME in $REGION; SSH from $ADDRESS: later changes with"
echo "gcloud compute firewall-rules update $NAME-ssh --source-ranges=ADDRESS/32"
