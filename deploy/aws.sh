#!/bin/sh
# deploy/aws.sh [REGION [ADDRESS]]: once for each region, before `ray up cluster.yaml`; running it again
# changes nothing. The head may start and end instances and look up the images of cluster.yaml; the
# nodes reach each other on all ports, ADDRESS (this machine's, if not given) reaches them by SSH, and
# nobody else reaches anything.
set -eu
REGION=${1:-us-west-2}
ADDRESS=${2:-$(curl -fsS https://checkip.amazonaws.com)}
NAME=manta
export AWS_DEFAULT_REGION="$REGION" AWS_PAGER=

if ! aws iam get-instance-profile --instance-profile-name $NAME-head >/dev/null 2>&1; then
  aws iam create-role --role-name $NAME-head --assume-role-policy-document \
    '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "sts:AssumeRole",
      "Principal": {"Service": "ec2.amazonaws.com"}}]}'
  for POLICY in AmazonEC2FullAccess AmazonSSMReadOnlyAccess; do
    aws iam attach-role-policy --role-name $NAME-head --policy-arn "arn:aws:iam::aws:policy/$POLICY"
  done
  aws iam create-instance-profile --instance-profile-name $NAME-head
  aws iam add-role-to-instance-profile --instance-profile-name $NAME-head --role-name $NAME-head
fi

VPC=$(aws ec2 describe-vpcs --filters Name=is-default,Values=true --query 'Vpcs[0].VpcId' --output text)
GROUP=$(aws ec2 describe-security-groups --filters Name=vpc-id,Values="$VPC" Name=group-name,Values=$NAME \
  --query 'SecurityGroups[0].GroupId' --output text)
if [ "$GROUP" = None ]; then
  GROUP=$(aws ec2 create-security-group --group-name $NAME --vpc-id "$VPC" \
    --description 'Manta: its own nodes, and SSH from one address' --query GroupId --output text)
  aws ec2 authorize-security-group-ingress --group-id "$GROUP" --protocol=-1 --source-group "$GROUP"
  aws ec2 authorize-security-group-ingress --group-id "$GROUP" --protocol tcp --port 22 \
    --cidr "$ADDRESS/32"
fi
echo "profile $NAME-head, security group $GROUP in $VPC ($REGION)"
